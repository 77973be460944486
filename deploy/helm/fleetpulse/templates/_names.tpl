{{- define "fleetpulse.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- /* what would install and then do nothing, or not install at all */}}
{{- define "fleetpulse.check" -}}
{{- if .Values.agent.enabled }}
{{- $_ := required "agent.kafka.bootstrapServers: wanted, as kafka.bootstrapServers: without brokers agents keep all telemetry on their nodes; agent.enabled=false leaves them out" .Values.agent.kafka.bootstrapServers }}
{{- if contains "fleetpulse-agent" .Release.Name }}
{{- fail (printf "release name %s: its agents would have the names of its server; expected one without fleetpulse-agent, such as fleetpulse" .Release.Name) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "fleetpulse.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "fleetpulse.tokens" -}}
{{ .Values.tokens.existingSecret | default (printf "%s-tokens" (include "fleetpulse.name" .)) }}
{{- end }}

{{- define "fleetpulse.labels" -}}
app.kubernetes.io/part-of: fleetpulse
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* selector of one component: (dict "root" $ "part" "pipeline") */}}
{{- define "fleetpulse.selector" -}}
app.kubernetes.io/name: fleetpulse-{{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "fleetpulse.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 8600
  runAsGroup: 8600
  fsGroup: 8600
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "fleetpulse.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{- define "fleetpulse.kafka" -}}
{{- with .Values.kafka }}
- { name: FLEETPULSE__PIPELINE__TRANSPORT, value: kafka }
- { name: FLEETPULSE__KAFKA__BOOTSTRAP_SERVERS, value: {{ required "kafka.bootstrapServers: wanted, such as kafka-1:9092" .bootstrapServers | quote }} }
- { name: FLEETPULSE__KAFKA__SECURITY_PROTOCOL, value: {{ .securityProtocol | quote }} }
{{- if hasPrefix "SASL" .securityProtocol }}
- { name: FLEETPULSE__KAFKA__USERNAME, value: {{ required "kafka.username: wanted with SASL" .username | quote }} }
{{- $_ := required "kafka.existingSecret: wanted with SASL, with the key kafka.password" .existingSecret }}
- { name: FLEETPULSE__KAFKA__PASSWORD_FILE, value: /etc/fleetpulse/kafka/kafka.password }
{{- end }}
{{- if hasSuffix "SSL" .securityProtocol }}
{{- $_ := required "kafka.existingSecret: wanted with SSL, with the key ca.crt; without SASL also tls.crt and tls.key" .existingSecret }}
- { name: FLEETPULSE__KAFKA__CA_FILE, value: /etc/fleetpulse/kafka/ca.crt }
{{- end }}
{{- if eq "SSL" .securityProtocol }}
- { name: FLEETPULSE__KAFKA__CERTIFICATE_FILE, value: /etc/fleetpulse/kafka/tls.crt }
- { name: FLEETPULSE__KAFKA__KEY_FILE, value: /etc/fleetpulse/kafka/tls.key }
{{- end }}
{{- end }}
{{- end }}

{{- define "fleetpulse.mounts" -}}
- { name: config, mountPath: /etc/fleetpulse/fleetpulse.toml, subPath: fleetpulse.toml, readOnly: true }
- { name: tmp, mountPath: /tmp }
{{- if .Values.kafka.existingSecret }}
- { name: kafka, mountPath: /etc/fleetpulse/kafka, readOnly: true }
{{- end }}
{{- if .Values.existingSecret }}
- { name: secrets, mountPath: /etc/fleetpulse/secrets, readOnly: true }
{{- end }}
{{- end }}

{{- define "fleetpulse.volumes" -}}
- { name: config, configMap: { name: {{ include "fleetpulse.name" . }} } }
- { name: tmp, emptyDir: { sizeLimit: 1Gi } }
{{- with .Values.kafka.existingSecret }}
- { name: kafka, secret: { secretName: {{ . }}, defaultMode: 0440 } }
{{- end }}
{{- with .Values.existingSecret }}
- { name: secrets, secret: { secretName: {{ . }}, defaultMode: 0440 } }
{{- end }}
{{- end }}

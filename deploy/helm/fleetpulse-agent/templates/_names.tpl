{{- define "agent.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "agent.account" -}}
{{ .Values.serviceAccount.name | default (include "agent.name" .) }}
{{- end }}

{{- define "agent.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "agent.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "agent.labels" -}}
{{ include "agent.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The agent writes its status every 10 s; asking `fleetpulse check` would cost as much as the agent itself. */}}
{{- define "agent.alive" -}}
livenessProbe:
  exec:
    command: [sh, -c, 'test -n "$(find "$RUNTIME_DIRECTORY" -name "*.status.json" -mmin -1)"']
  initialDelaySeconds: 60
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 4
{{- end }}

{{- define "agent.rights" -}}
{{ .Release.Namespace }}:{{ include "agent.name" . }}
{{- end }}

{{- define "agent.kafka" -}}
{{- with .Values.global.site }}
- { name: FLEETPULSE__SITE__NAME, value: {{ . | quote }} }
{{- end }}
{{- with .Values.kafka }}
{{- if .bootstrapServers }}
- { name: FLEETPULSE__PIPELINE__TRANSPORT, value: kafka }
- { name: FLEETPULSE__KAFKA__BOOTSTRAP_SERVERS, value: {{ .bootstrapServers | quote }} }
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
{{- end }}
